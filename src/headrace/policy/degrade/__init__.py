"""What less is a request given when it cannot be served as asked, and when?"""
