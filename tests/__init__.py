"""The tests; a package so that spawned processes find it before any other named tests."""
