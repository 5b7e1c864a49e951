"""What other libraries call: each module imports its library, and the core imports none of them."""
