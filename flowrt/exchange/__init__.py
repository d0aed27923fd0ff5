"""exchange: how workers trade tensors. Now: dispatch and combine at the client, the expert service at the server."""
