"""How long does a step of an optimizer take, of the device and of the host, and how exact is it?"""
