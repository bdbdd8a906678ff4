"""The session protocol between engines, the attacher and the node daemon."""
