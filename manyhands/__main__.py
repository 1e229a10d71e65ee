# SPDX-License-Identifier: Apache-2.0
from manyhands.cli.exit_codes import main

if __name__ == "__main__":
    main()
