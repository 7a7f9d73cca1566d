"""From closures to something that runs: lower (kernels), link (the deferred inline), execute."""
