"""Long measurements that back the figures of the README; nothing else imports this package."""
