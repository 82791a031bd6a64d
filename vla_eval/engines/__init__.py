"""Running networks: a pen that draws them, weights, bundles, and the backends that execute them."""
