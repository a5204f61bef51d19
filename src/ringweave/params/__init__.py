"""The asynchronous parameter server of PS-HRA: rings of workers push, one server applies at once, nobody waits for all.

`rules` decides and is pure; `serving` holds the parameters; `ring` is the workers' side. [docs/parameter-server.md]
"""
