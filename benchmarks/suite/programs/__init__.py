"""The programs of the suite, a module a group."""
