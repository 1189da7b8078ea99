"""What travels between Tandem's processes: messages, their codec, the sockets, and the error tree.

This is the only package that imports zmq. It knows nothing of HTTP, models or torch.
"""
