"""The web interface: pages for people, on the port of the web API, which work without scripts."""
