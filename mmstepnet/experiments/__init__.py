"""The experiments that ``tools/reproduce.py`` runs: tables of many runs that can be stopped."""
