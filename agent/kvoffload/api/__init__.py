"""Pydantic models of the Kubernetes API; the CRDs are generated from them."""
