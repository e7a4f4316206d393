"""
Code that runs before click and Twisted are loaded: the process, simple command lines, connections in advance.
"""
