"""`baton doctor kubernetes`: compares a live namespace with the promises of deploy/README.md. Reads only.

`access` finds the API server, `reader` reads, `facts` holds the objects; each other file checks one topic.
"""
