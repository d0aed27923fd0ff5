"""serving: text in and out (tokenizer now, HTTP later). No torch, no channels; talks to the gateway."""
