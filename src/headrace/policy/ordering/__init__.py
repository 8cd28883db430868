"""Which request goes first, within a tenant and between tenants?"""
