"""The processes of a fleet by their certificates, and the methods that each may call."""
