"""Files and folders that several processes share, checked before they are used.

torch_store  adapter: entries and compiled objects, named by content; the folder of Inductor
container    a file of plain parts, whose every byte is checked before it is used
safetensors  the format of safetensors: tensors by name, and no code
"""
