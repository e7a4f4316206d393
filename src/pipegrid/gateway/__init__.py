"""The gateway: other programs' protocols on top of a grid. Nothing below imports it."""
