"""gRPC over HTTP/2 in one thread and few system calls, for calls that are answered at once.

grpcio's asyncio server hands every part of a call from thread to thread; measured for an empty unary call, that is
three to four times the processor time of a placement. This server takes what a call brings in one read, and answers in
one write. It serves generated servicers unchanged, of all four kinds, to any gRPC client.
"""
