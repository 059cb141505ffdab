"""Every rule about configurations: one function per rule, named as the statement that must hold."""
