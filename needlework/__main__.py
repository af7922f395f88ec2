"""`python -m needlework` is the command line."""

from needlework.cli import main

main()
