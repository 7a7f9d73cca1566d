"""Files and folders that several processes share, checked before they are used.

torch_store  adapter: entries and compiled objects, named by content; the folder of Inductor
container    a file of plain parts, every byte checked before use; tensors as in safetensors
"""
