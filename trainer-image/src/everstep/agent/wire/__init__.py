"""The protocol between agents, their leader and the operator: messages, authentication, HTTP and links.

Here belongs what both ends of a connection must agree on. What a message leads to is decided in leader/ and node/.
"""
