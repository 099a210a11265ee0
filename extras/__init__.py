"""What not every run needs: common.import_extra() loads a file when a flag asks for it."""
