"""Long measurements behind the figures of the README.

Nothing else imports this package, except its tests.
"""
