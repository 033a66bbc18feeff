"""The Python behind the commands in scripts/: `python -m ea_tools NAME`, as scripts/lib.sh runs it."""
