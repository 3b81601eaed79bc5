"""The commands: flags, build the parts, call the library."""
