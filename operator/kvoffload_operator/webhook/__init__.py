"""Admission: prediction, injection and validation are pure; `server` and `certificates` do the rest."""
