import sys

from tests.support.chaos.campaign import main

if __name__ == "__main__":
    sys.exit(main())
