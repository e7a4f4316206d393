"""
The gateway: other programs store on a grid through it, by their own protocols. No lower layer imports this
package.
"""
