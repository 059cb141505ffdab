"""The transformer: blocks, MTP modules, decoder. Single-device code that never sees a process group."""
