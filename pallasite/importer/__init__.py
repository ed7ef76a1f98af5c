"""Traced jaxprs become kernel IR here, and end here."""
