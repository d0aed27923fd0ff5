"""Expert exchange between workers: dispatch and combine at the client, the expert service at the server."""
