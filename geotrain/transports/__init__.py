"""Transports carry frames between peers. Pure."""
