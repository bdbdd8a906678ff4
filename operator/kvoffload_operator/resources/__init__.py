"""Pure builders of manifests, one file per object."""
