"""One compiled call that looks at an optimizer, launches its step and counts it (``look.cpp``), and how it is built."""
