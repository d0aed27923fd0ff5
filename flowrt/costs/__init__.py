"""What computing and sending cost: devices, links and models as cards, models of times and their fit, the papers' equations. Pure."""
