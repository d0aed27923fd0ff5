"""Messages as bytes: types, codec, addresses and the handshake."""
