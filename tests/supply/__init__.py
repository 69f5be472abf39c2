"""Tests of released artefacts: pins, locks, licences, images, workflows."""
