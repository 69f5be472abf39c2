"""Support for tests of several folders: servers as processes, fakes, waiting without sleeping."""
