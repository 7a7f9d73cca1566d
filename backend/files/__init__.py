"""Files and folders that several processes share, checked before they are used.

atomic_write  files that appear complete under their name, or not at all
ownership     who else may have written a file, or may exchange it
disk          the on-disk cache: entries and compiled objects, named by content
torch_folder  adapter: the folder in which Inductor builds and finds shared objects
"""
