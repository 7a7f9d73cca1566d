"""Files and folders that several processes share, checked before they are used.

disk          the on-disk store: entries and compiled objects, named by content
torch_folder  adapter: the folder in which Inductor builds and finds shared objects
"""
