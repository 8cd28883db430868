"""How many groups is a pool to have?"""
