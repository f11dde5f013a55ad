"""Why a gradient does not exist, is zero, or must be read with care."""
