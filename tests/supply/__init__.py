"""What is shipped: pins, locks, licences, images, workflows."""
