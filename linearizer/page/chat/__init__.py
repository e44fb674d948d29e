"""The step Compare: a chat with teacher, student and a plain window.

compare has its parts and events, cards what it shows, answers what the models read and write, chats what is kept.
"""
