"""`baton doctor`: what keeps a service from running well here, and the line that mends it.

One file a topic: its facts as a frozen dataclass, pure functions from facts to findings, and one function that looks.
"""
