"""Python clients of memd and inferd, and the pagepool command."""
