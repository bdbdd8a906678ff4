"""Operator and admission webhook of kvoffload."""
