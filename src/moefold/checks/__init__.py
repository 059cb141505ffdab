"""Every rule about configurations: one rule, one function, named as the truth it defends."""
