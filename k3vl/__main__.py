"""``python -m k3vl``."""

from k3vl.app.cli import main

if __name__ == "__main__":
    main()
