"""What travels between Tandem's processes: messages, their codec, and the sockets.

The only package that imports zmq. It knows nothing of HTTP, models or torch.
"""
